// Starts Swagger UI on our own description, with the header that a change by cookie needs.
window.SwaggerUIBundle({
  url: "/api/v1/openapi.json",
  dom_id: "#api",
  deepLinking: true,
  validatorUrl: null,
  tryItOutEnabled: false,
  requestInterceptor(request) {
    request.headers["X-Marchline"] = "1";
    return request;
  },
});
